// A button that copies the code of a block, without prompts and outputs.
document.addEventListener("DOMContentLoaded", () => {
  for (const block of document.querySelectorAll("div.highlight")) {
    const pre = block.querySelector("pre");
    if (!pre || !navigator.clipboard) continue;
    const button = document.createElement("button");
    button.className = "copy";
    button.type = "button";
    button.textContent = "copy";
    button.setAttribute("aria-label", "Copy the code");
    button.addEventListener("click", async () => {
      const lines = pre.textContent.trimEnd().split("\n");
      const prompts = lines.filter((line) => /^(>>>|\.\.\.)( |$)/.test(line)).map((line) => line.slice(4));
      await navigator.clipboard.writeText((prompts.length ? prompts : lines).join("\n") + "\n");
      button.textContent = "copied";
      setTimeout(() => (button.textContent = "copy"), 1500);
    });
    block.append(button);
  }
});
