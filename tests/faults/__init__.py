"""Machines that fail: power that goes at any instant, disks that refuse any operation."""
