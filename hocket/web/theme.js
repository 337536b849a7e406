// Sets the chosen theme before the first paint; a plain script, because modules run after it.
try {
  const theme = localStorage.getItem("hocket.theme");
  if (theme) document.documentElement.dataset.theme = theme;
} catch {
  // Storage may be forbidden; the system's theme is then used.
}
