"""Names the columns of the table that the model reads."""

NUMBERS = ("months", "calls", "bill")
