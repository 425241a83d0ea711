"""The MCP endpoint: any session id, both protocol eras, results that outlive the connection."""
