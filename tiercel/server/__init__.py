"""The HTTP process: asyncio, text and admission. It never imports torch; the engine is its child process."""
