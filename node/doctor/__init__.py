"""Checks of a host, each {name, status, detail, fix}."""
