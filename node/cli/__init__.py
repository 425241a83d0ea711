"""boxctl: the operator's command for one host and its coordinator. A client only."""
