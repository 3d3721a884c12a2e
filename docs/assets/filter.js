// On the page of jobs and plans: a field that leaves only the rows with all of its words. A sign counts as its word.
const SIGNS = { "~": "coupled", "-": "refused", X: "wrong" }

document.addEventListener("DOMContentLoaded", () => {
  const start = document.getElementById("every-job-under-every-plan")
  if (!start) return
  const plain = text => text.toLowerCase().replaceAll("_", "")
  const sections = []
  for (const node of document.querySelectorAll("article h3, article table")) {
    if (!(start.compareDocumentPosition(node) & Node.DOCUMENT_POSITION_FOLLOWING)) continue
    if (node.matches("h3")) sections.push({ shown: [node], rows: [] })
    else {
      sections.at(-1).shown.push(node)
      for (const row of node.tBodies[0].rows) {
        const words = [...row.cells].map(cell => SIGNS[cell.textContent.trim()] ?? cell.textContent)
        sections.at(-1).rows.push({ row, text: plain(words.join(" ")) })
      }
    }
  }
  const field = document.createElement("input")
  Object.assign(field, { type: "search", placeholder: "Filter: a job, an idea, refused, coupled" })
  field.className = "md-input md-input--stretch"
  field.addEventListener("input", () => {
    const words = plain(field.value).split(/\s+/)
    for (const { shown, rows } of sections) {
      for (const { row, text } of rows) row.hidden = !words.every(word => text.includes(word))
      const display = rows.every(({ row }) => row.hidden) ? "none" : ""
      for (const node of shown) node.style.display = display  // the theme's style of tables ignores `hidden`
    }
  })
  start.after(field)
})
