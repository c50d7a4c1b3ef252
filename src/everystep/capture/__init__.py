"""Taking what training consumed, on the training thread: census, tap, watch. Never waits by itself."""
