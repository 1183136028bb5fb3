"""`hoststage bench`: the daemon measured beside the machine's ceilings and its peers, in one run."""
