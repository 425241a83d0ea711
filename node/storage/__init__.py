"""Where a box's bytes lie: disks, RAM files, and the space they need."""
