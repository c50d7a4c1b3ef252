"""The process that outlives the trainer: it receives records, replays them, persists and serves."""
