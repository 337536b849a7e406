"""The HTTP server: one file per resource, no model.

Routes validate, hand over to the engine and encode what comes back. `hocket.server.app.create_app`
makes the application; the engine it serves is started and closed by whoever made it.
"""
