"""The same six jobs through seven trainers on two CPU ranks, each against one device: `docs/who-is-right.md`."""
