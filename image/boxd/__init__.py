"""boxd, the daemon inside a box. Standard library only; installed in the guest as package `boxd`.

server.py > commands.py > processes.py  output.py      routes; what commands there are; sessions and reaping; spooled streams
readiness.py  attach.py                                waiting for a port or a line; a command whose streams go both ways
identity.py  desktop.py  health.py                     clock, randomness and names after a restore; Xvfb; what the box says of itself
http1.py  wire.py  protocol.py                         HTTP/1.1; dataclasses as JSON; what the node and boxd say to each other
"""
