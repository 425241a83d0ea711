"""A box's network: namespace, links, addresses, rules, names.

    addresses     which address is whose, and which no box may reach (pure)
    namespace     named network namespaces, and working inside of one
    link          the tap, the veth pair that is the slot, byte counters
    firewall      the rules as data; legacy tables and nftables
    network       BoxNetwork: all of that for one box, made whole or not at all
    dns_message   DNS messages (pure)
    dns           the resolver process
    resolver      its owner in the daemon
"""
