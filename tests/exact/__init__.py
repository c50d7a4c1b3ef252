"""Everything comes back bit for bit: crashed and resumed runs against unbroken ones."""
