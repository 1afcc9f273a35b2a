"""The file, in two rooms.

`connection`, `file`, `faults`, `statements`, `blob` and `tally` are literal SQL on the standard library's `sqlite3`:
all that a compiling or loading process needs. `schema`, `migrate`, `queries` and `adhoc` are what people ask, on
SQLAlchemy Core and alembic, whose imports take 160 to 280 ms: they are imported on first use.
"""
