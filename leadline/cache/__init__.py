"""Cache memory: pages, slots, and the integers that describe them. Only ``pool`` knows torch."""
