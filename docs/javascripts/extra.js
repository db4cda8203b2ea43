// Give the cells of tables with three columns and more their headings, which extra.css shows on a phone.
for (const table of document.querySelectorAll(".md-typeset table:not([class])")) {
  const headings = [...table.querySelectorAll("th")].map((cell) => cell.textContent.trim());
  for (const row of headings.length > 2 ? table.tBodies[0].rows : [])
    [...row.cells].forEach((cell, column) => {
      if (column && headings[column]) cell.dataset.heading = headings[column];
    });
}
// Browsers break code after each hyphen: keep words such as --ntasks-per-node=1 whole, and break long ones after dots.
for (const code of document.querySelectorAll(".md-typeset :not(pre) > code")) {
  if (code.childElementCount) continue;
  const words = code.textContent.split(/(\s+)/).map((text) => {
    const word = document.createElement("span");
    if (text.length < 40) word.style.whiteSpace = text.trim() ? "nowrap" : "";
    const parts = text.length < 40 ? [text] : text.split(/(?<=[.,:=/(\[])/);
    word.append(...parts.flatMap((part, index) => (index ? [document.createElement("wbr"), part] : [part])));
    return word;
  });
  code.replaceChildren(...words);
}
