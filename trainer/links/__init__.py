"""The network between the ranks: measure collectives and links, compare them with the hardware, name what is slow."""
