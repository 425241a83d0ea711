"""boxd, the daemon inside a box. Standard library only; installed in the guest as package `boxd`.

server.py > commands.py > processes.py > output.py     HTTP; what commands there are; one process group; its spooled streams
identity.py  desktop.py                                clock, randomness and names after a restore; Xvfb and what shows on it
attach.py                                              a command whose streams go both ways
protocol.py                                            what the node and boxd say to each other
"""
