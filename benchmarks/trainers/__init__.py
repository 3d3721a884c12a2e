"""The same six jobs through eight trainers on two CPU ranks, each against one device: `docs/who-is-right.md`."""
