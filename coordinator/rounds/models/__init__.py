"""Models in use: the rules of their promotion, operators' requests, and the states that devices are to have."""
