// Give the cells of tables with three columns and more their headings, which extra.css shows on a phone.
for (const table of document.querySelectorAll(".md-typeset table:not([class])")) {
  const headings = [...table.querySelectorAll("th")].map((cell) => cell.textContent.trim());
  for (const row of headings.length > 2 ? table.tBodies[0].rows : [])
    [...row.cells].forEach((cell, column) => {
      if (column && headings[column]) cell.dataset.heading = headings[column];
    });
}
