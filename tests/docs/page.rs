//! Blocks and links of a page.

use std::path::Path;

pub(crate) struct Page {
    /// Path from the root of the repository.
    pub(crate) name: String,
    text: String,
    pub(crate) blocks: Vec<Block>,
}

#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    Run,
    NotRun(String),
    Usage,
    Other,
}

impl Kind {
    fn parse(info: &str) -> Option<Self> {
        match info.split_once(' ').unwrap_or((info, "")) {
            ("sh", "") => Some(Self::Run),
            ("sh", rest) => {
                let why = rest.strip_prefix("norun: ")?.trim();
                (!why.is_empty()).then(|| Self::NotRun(why.into()))
            }
            ("usage", "") => Some(Self::Usage),
            _ => Some(Self::Other),
        }
    }
}

pub(crate) struct Block {
    pub(crate) line: usize,
    pub(crate) kind: Kind,
    text: String,
}

impl Block {
    /// Returns the lines without comments. Continued lines are joined.
    pub(crate) fn commands(&self) -> impl Iterator<Item = String> {
        let whole = self.text.replace("\\\n", " ");
        let lines: Vec<_> = whole.lines().map(|line| uncomment(line).trim().to_owned()).collect();
        lines.into_iter().filter(|line| !line.is_empty())
    }

    /// Returns whether a block runs a KVM guest, which is the default kind.
    pub(crate) fn needs_kvm(&self) -> bool {
        self.commands().any(|line| line.starts_with("vmferry run ") && !line.contains("--guest process"))
    }
}

/// Removes a comment. It begins at a `#` outside of quotes that is the first character of a word.
fn uncomment(line: &str) -> &str {
    let (mut quote, mut before) = (None, ' ');
    for (at, c) in line.char_indices() {
        match (quote, c) {
            (None, '#') if before.is_whitespace() => return &line[..at],
            (None, '\'' | '"') => quote = Some(c),
            (Some(open), _) if open == c => quote = None,
            _ => {}
        }
        before = c;
    }
    line
}

/// Splits a line at blanks. Quoted text is one word.
pub(crate) fn words(line: &str) -> Vec<String> {
    let (mut words, mut quote) = (vec![String::new()], None);
    for c in line.chars() {
        match (quote, c) {
            (None, '\'' | '"') => quote = Some(c),
            (Some(open), _) if open == c => quote = None,
            (None, _) if c.is_whitespace() => words.push(String::new()),
            _ => words.last_mut().unwrap().push(c),
        }
    }
    words.retain(|word| !word.is_empty());
    words
}

impl Page {
    pub(crate) fn read(root: &Path, path: &Path) -> Self {
        let name = path.strip_prefix(root).unwrap().display().to_string();
        let text = std::fs::read_to_string(path).unwrap();
        let blocks = blocks(&name, &text);
        Self { name, text, blocks }
    }

    /// Returns the targets of `[text](target)` outside of blocks.
    pub(crate) fn links(&self) -> impl Iterator<Item = String> {
        let mut inside = false;
        let prose: Vec<_> = self
            .text
            .lines()
            .filter(|line| {
                let fence = line.trim_start().starts_with("```");
                inside ^= fence;
                !inside && !fence
            })
            .collect();
        let prose = prose.join("\n");
        let links: Vec<_> = prose
            .split("](")
            .skip(1)
            .filter_map(|rest| rest.split_once(')').map(|(link, _)| link.to_owned()))
            .collect();
        links.into_iter()
    }
}

fn blocks(name: &str, text: &str) -> Vec<Block> {
    let (mut blocks, mut open) = (Vec::new(), None::<Block>);
    for (line, content) in text.lines().enumerate() {
        match (content.trim_start().strip_prefix("```"), &mut open) {
            (Some(info), None) => {
                let kind = Kind::parse(info.trim())
                    .unwrap_or_else(|| panic!("{name}:{}: '{info}': write `sh norun: WHY`", line + 1));
                open = Some(Block { line: line + 1, kind, text: String::new() });
            }
            (Some(_), Some(_)) => blocks.extend(open.take()),
            (None, Some(block)) => {
                block.text.push_str(content);
                block.text.push('\n');
            }
            (None, None) => {}
        }
    }
    assert!(open.is_none(), "{name}: a block is not closed");
    blocks
}

#[test]
fn blocks_and_their_commands_are_found() {
    let text = "a\n```sh\nvmferry run --x 'a # b' \\\n   --y   # why\n\n# nothing\nvmferry check\n```\n```sh norun: no net\nx\n```\n```\ny\n```\n";
    let found = blocks("page", text);
    assert_eq!(found.len(), 3);
    assert_eq!((found[0].line, &found[0].kind), (2, &Kind::Run));
    let commands: Vec<_> = found[0].commands().collect();
    assert_eq!(commands, ["vmferry run --x 'a # b'     --y", "vmferry check"]);
    assert_eq!(words(&commands[0]), ["vmferry", "run", "--x", "a # b", "--y"]);
    assert!(found[0].needs_kvm());
    assert_eq!(found[1].kind, Kind::NotRun("no net".into()));
    assert_eq!(found[2].kind, Kind::Other);
    assert_eq!(Kind::parse("sh norun"), None, "a reason is asked for");
}
