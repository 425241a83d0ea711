"""A box's network: namespace, links, addresses, rules, names."""
