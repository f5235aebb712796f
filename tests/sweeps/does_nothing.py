"""In place of a cell's program: ends well and leaves nothing."""

print("nothing is done")
