"""View: Streamlit pages and chart builders."""
