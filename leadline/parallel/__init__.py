"""Where this rank stands among others: integers, and later collectives."""
