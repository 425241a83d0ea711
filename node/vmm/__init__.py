"""QEMU, from its words to what the host can do.

command.py                argument list and kernel line (pure)
process.py  qmp.py        a child with a pidfd; the monitor's client
machine.py > the three    one QEMU as an owned thing: spawn, load, cont, freeze, kill
snapshot.py               what a saved machine needs to come back, once
probe.py                  KVM or not, the TSC, which QEMU
"""
