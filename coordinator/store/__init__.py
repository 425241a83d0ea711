"""SQLite through aiosqlite: the database, its migrations, and one module a table."""
