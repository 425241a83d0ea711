"""Tools: what an agent sees, one module a tool. tool.py says what a tool is, context.py what it may do, table.py lists them."""
