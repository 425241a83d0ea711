"""The daemon of one host: owns its microVMs, their network, memory and disks, and keeps its promises with the coordinator down.

daemon.py > api.py > boxes.py > box.py     a call's way down: process, HTTP, all boxes, one box with one lock
vms.py < microvm.py > workshop.py          what a box needs of microVMs; the sequences by which they live; what they are made with
template.py  guest.py > boxd_http.py       the frozen first boot that boxes start from; the client of boxd
operations.py  relay.py  unsaved.py        work that outlives its clients; attached bytes; what a delete would lose
journal.py  lifecycle.py                   what is on disk about each box; which clock acts next (pure)
vmm/  net/  storage/                       QEMU; namespaces, links, rules; disks, RAM files, space
doctor/  cli/                              checks of a host; boxctl
wiring.py  host.py  fleet.py               how the parts are put together; what the host has; enrolment and heartbeats
protocol.py  errors.py  config.py          what is said over the wire; what can go wrong; what an operator may set
"""
