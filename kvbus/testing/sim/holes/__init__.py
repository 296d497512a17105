"""Each hole of the protocol by name: the one interleaving against which a rule stands, and the rule taken out of it."""
