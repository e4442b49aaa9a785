"""The families of networks: a table of rows for each, and the blocks that a row is made of."""
