"""Measured rates -> cost model -> how often to do what, with reasons. Pure, without torch."""
