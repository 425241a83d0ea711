"""Accounts, placement, routing: owns what people and agents said, and knows which node has which box.

daemon.py > app.py > mcp/  rest/           process, doors, and what is behind them
boxes.py > fleet.py  conversations.py  keys.py
node_client.py  placement.py  certificates.py
store/                                     SQLite: the database and one module a table
"""
