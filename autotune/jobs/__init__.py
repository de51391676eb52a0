"""What a person asks for, and one run of it: requests, sessions, and the desk that the loop works at."""
