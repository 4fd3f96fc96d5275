"""What logs and recordings of any training program say: alarms, where a fault began, and two logs compared."""
