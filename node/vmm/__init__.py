"""QEMU: its argument list, its monitor, one process as an owned thing, saved states and what the host can do."""
