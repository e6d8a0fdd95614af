// Draws the Mermaid blocks of a page. Without mermaid.min.js the page shows their source text.
(() => {
    const blocks = document.querySelectorAll("code.language-mermaid");
    if (blocks.length === 0) return;
    const script = document.createElement("script");
    script.src = `${path_to_root}mermaid.min.js`;
    script.onload = () => {
        for (const block of blocks) {
            const diagram = document.createElement("pre");
            diagram.className = "mermaid";
            diagram.textContent = block.textContent;
            block.closest("pre").replaceWith(diagram);
        }
        const dark = /ayu|coal|navy/.test(document.documentElement.className);
        mermaid.initialize({ startOnLoad: false, theme: dark ? "dark" : "neutral" });
        mermaid.run();
    };
    document.head.append(script);
})();
