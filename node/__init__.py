"""The daemon of one host: owns its microVMs, their network, memory and disks, and keeps its promises with the coordinator down.

daemon.py > api.py > boxes.py > box.py     a call's way down: process, HTTP, all boxes, one box with one lock
template.py  guest.py                      the frozen first boot that boxes start from; the client of boxd
journal.py  lifecycle.py                   what is on disk about each box; which clock acts next (pure)
vmm/  net/  storage/                       QEMU; namespaces, links, rules; disks, RAM files, space
doctor/  cli/                              checks of a host; boxctl
protocol.py  errors.py  config.py          what is said over the wire; what can go wrong; what an operator may set
"""
