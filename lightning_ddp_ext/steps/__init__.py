"""The steps of one rank: a driver, and the parts that take part in each step."""
