"""The MCP endpoint: any session id, both protocol eras, results that outlive the connection.

endpoint.py > callers.py, messages.py     HTTP: who calls, and with which message
events.py > calls.py > surface.py         the answer as JSON or as a stream; calls at work; what the server says of itself
"""
