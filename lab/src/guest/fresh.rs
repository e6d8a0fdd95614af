//! Check that new memory of a process reads as zeros.

use anyhow::{Context, Result, ensure};
use std::hint::black_box;

const PAGE: usize = 4096;
/// Byte of each page that is written, so that the kernel provides a page of its own.
const WRITTEN: usize = 2048;

/// Allocates `mib` MiB, makes the kernel provide every page, and checks that all other bytes are
/// zero. Prints a line that begins with `LAB-FRESH` or `LAB-WRONG`.
pub(crate) fn check(mib: &str) -> Result<()> {
    let mib: usize = mib.parse().with_context(|| format!("{mib} is not a number of MiB"))?;
    // An allocation of this size is a new mapping, which nothing has written to.
    let mut pages = vec![[0u8; PAGE]; mib << 8];
    for page in &mut pages {
        page[WRITTEN] = 1;
    }
    let wrong = wrong(black_box(&pages));
    ensure!(wrong == 0, "LAB-WRONG {wrong} new pages of {} do not read as zeros", pages.len());
    println!("LAB-FRESH {} pages", pages.len());
    Ok(())
}

/// Returns the number of pages that contain anything besides the written byte.
fn wrong(pages: &[[u8; PAGE]]) -> usize {
    let mut expected = [0; PAGE];
    expected[WRITTEN] = 1;
    pages.iter().filter(|page| **page != expected).count()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pages_with_other_content_are_counted() {
        let mut pages = vec![[0; PAGE]; 3];
        assert_eq!(wrong(&pages), 3);
        pages.iter_mut().for_each(|page| page[WRITTEN] = 1);
        assert_eq!(wrong(&pages), 0);
        pages[1][PAGE - 1] = 0xaa;
        assert_eq!(wrong(&pages), 1);
        check("1").unwrap();
        assert!(check("x").is_err());
    }
}
