"""Checks of a host, each {name, status, detail, fix}.

facts.py     what this host is like: asks the kernel, QEMU and the file system; changes nothing
checks.py    what that means: pure, a table of functions
"""
