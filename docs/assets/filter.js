// On the page of jobs and plans: a field that leaves only the rows with all of its words.
document.addEventListener("DOMContentLoaded", () => {
  const start = document.getElementById("every-job-under-every-plan")
  if (!start) return
  const rows = [...document.querySelectorAll("article table tbody tr")].filter(
    row => start.compareDocumentPosition(row) & Node.DOCUMENT_POSITION_FOLLOWING)
  const field = document.createElement("input")
  Object.assign(field, { type: "search", placeholder: "Filter rows: a job, or a verdict" })
  field.className = "md-input md-input--stretch"
  field.addEventListener("input", () => {
    const words = field.value.toLowerCase().split(/\s+/)
    for (const row of rows)
      row.hidden = !words.every(word => row.textContent.toLowerCase().includes(word))
  })
  start.after(field)
})
