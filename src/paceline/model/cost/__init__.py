"""What a job costs on one device, figure by figure, and how fast a device is."""
