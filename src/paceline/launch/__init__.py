"""Starting ranks: forked here, or joined to those of torchrun or Slurm."""
