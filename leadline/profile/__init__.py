"""Where the time of a step goes, beside what the machine could do."""
