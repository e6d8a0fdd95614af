//! Deltas: the difference of a page from the version that the target has.
//!
//! A page has 512 words of eight bytes, in 8 groups of 64 words. A word is little-endian: its byte
//! 0 is the lowest. A delta names the words that changed, and their new content. It replaces bytes
//! and does not combine them with the old ones, so applying a delta twice has the effect of once.
//!
//! | offset | bytes | field |
//! |---|---|---|
//! | 0 | 1 | form: 0 words, 1 bytes |
//! | 1 | 1 | groups: bit `g` is set if words of group `g` changed |
//! | 2 | 8 for each group that is set in `groups` | bit `w` is set if word `w` of the group changed. At least one bit is set |
//! | then, in form 0 | 8 for each changed word | the new word |
//! | then, in form 1 | 1 for each changed word | bit `b` is set if byte `b` of the word changed. At least one bit is set |
//! | then, in form 1 | 1 for each changed byte | the new byte |
//!
//! Groups, words and bytes are in ascending order. The lengths follow from the masks, so a delta
//! needs no length of its own. A page that did not change has the delta `00 00`.
//!
//! The encoder takes form 1 if it is shorter. Counters, flags, timestamps and pointers into the
//! same object change few bytes of a word. A page with one counter that was incremented has 12
//! bytes in form 1 and 18 in form 0. A page in which a tenth of all words are such counters has
//! about 170 bytes instead of 470. If all bytes of the changed words changed, form 0 is shorter by
//! an eighth.
//!
//! # Validation
//!
//! [`Delta::parse`] checks the whole delta before a byte of a page changes. [`Delta::apply`] cannot
//! fail. A delta that is applied to another version than the one that it was encoded against gives
//! a wrong page, which only the digest of the page detects.

#[cfg(target_arch = "x86_64")]
#[expect(
    unsafe_code,
    reason = "vector loads, prefetches, and calls of functions that need processor features"
)]
mod x86;

use crate::Page;
use std::fmt;
use std::sync::OnceLock;
use vmferry_core::PAGE_BYTES;

/// Number of words in a group.
const GROUP_WORDS: usize = 64;
/// Number of bytes in a group.
const GROUP_BYTES: usize = GROUP_WORDS * 8;
/// Number of groups in a page.
const GROUPS: usize = PAGE_BYTES / GROUP_BYTES;
/// Number of words in a page.
const WORDS: usize = PAGE_BYTES / 8;
/// Number of bytes before the masks of the groups.
const HEAD: usize = 2;

/// Maximum length of a delta in bytes: a delta is shorter than a page.
pub const MAX_DELTA: usize = PAGE_BYTES - 1;

/// Bytes of a group.
type Group = [u8; GROUP_BYTES];
/// Words of a group.
type GroupWords = [[u8; 8]; GROUP_WORDS];
/// Mask of changed words for each group.
type Masks = [u64; GROUPS];

/// Encoding of the changed words.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Form {
    Words,
    Bytes,
}

/// Returns the words of a page.
fn words(page: &Page) -> &[[u8; 8]; WORDS] {
    let (words, _) = page.as_chunks();
    words.try_into().expect("a page has that number of words")
}

/// Iterator over the set bits of a word, in ascending order.
struct Bits(u64);

impl Iterator for Bits {
    type Item = usize;

    #[inline]
    fn next(&mut self) -> Option<usize> {
        let bit = self.0.trailing_zeros();
        self.0 &= self.0.wrapping_sub(1);
        (bit < u64::BITS).then_some(bit as usize)
    }
}

/// Returns the numbers of the changed words of a page, in ascending order.
fn changed_words(masks: &Masks) -> impl Iterator<Item = usize> {
    masks.iter().enumerate().flat_map(|(group, &mask)| Bits(mask).map(move |bit| group * GROUP_WORDS + bit))
}

/// Returns the mask of the bytes in which two words differ.
#[inline(always)]
fn changed_bytes(old: &[u8; 8], new: &[u8; 8]) -> u8 {
    const LOW: u64 = 0x7f7f_7f7f_7f7f_7f7f;
    let difference = u64::from_le_bytes(*old) ^ u64::from_le_bytes(*new);
    // The top bit of each byte is set if the byte is not zero. No addition carries into the next
    // byte.
    let top = (((difference & LOW) + LOW) | difference) & !LOW;
    // The product moves bit 8 b to bit 56 + b. All other products are distinct and lower.
    ((top >> 7).wrapping_mul(0x0102_0408_1020_4080) >> 56) as u8
}

/// Comparison of pages with the instructions of this processor.
#[derive(Debug, Clone, Copy)]
pub struct Comparer(Kernel);

#[derive(Debug, Clone, Copy)]
enum Kernel {
    Portable,
    #[cfg(target_arch = "x86_64")]
    Avx2(x86::Avx2),
    #[cfg(target_arch = "x86_64")]
    Avx512(x86::Avx512),
}

impl Comparer {
    /// Returns the fastest comparison that this processor supports. The choice is made once.
    #[must_use]
    pub fn best() -> Self {
        static BEST: OnceLock<Comparer> = OnceLock::new();
        *BEST.get_or_init(|| {
            let found = Self::all().into_iter().find_map(|(_, comparer)| comparer.ok());
            found.unwrap_or(Self(Kernel::Portable))
        })
    }

    /// Returns the name of every comparison, fastest first, with the comparison or the reason why
    /// this processor does not support it.
    #[must_use]
    pub fn all() -> Vec<(&'static str, Result<Self, &'static str>)> {
        vec![
            #[cfg(target_arch = "x86_64")]
            ("avx512", x86::Avx512::detect().map(|proof| Self(Kernel::Avx512(proof)))),
            #[cfg(target_arch = "x86_64")]
            ("avx2", x86::Avx2::detect().map(|proof| Self(Kernel::Avx2(proof)))),
            ("portable", Ok(Self(Kernel::Portable))),
        ]
    }

    /// Returns the difference of two pages, or `None` if its delta would have more than `limit`
    /// bytes. Ends at the first group with which the delta exceeds `limit`.
    #[inline]
    fn compare(self, old: &Page, new: &Page, limit: usize) -> Option<Difference> {
        match self.0 {
            Kernel::Portable => by_groups(old, new, limit, compare_group),
            #[cfg(target_arch = "x86_64")]
            Kernel::Avx2(proof) => proof.compare(old, new, limit),
            #[cfg(target_arch = "x86_64")]
            Kernel::Avx512(proof) => proof.compare(old, new, limit),
        }
    }
}

/// Difference of two pages.
#[derive(Debug, Clone, Copy)]
struct Difference {
    masks: Masks,
    /// Number of groups with changed words.
    groups: usize,
    /// Number of changed words.
    words: usize,
    /// Number of changed bytes.
    bytes: usize,
}

impl Difference {
    /// Returns the shorter form.
    #[inline(always)]
    fn form(&self) -> Form {
        if self.words + self.bytes < self.words * 8 { Form::Bytes } else { Form::Words }
    }

    /// Returns the length of the delta in bytes.
    #[inline(always)]
    fn len(&self) -> usize {
        let content = match self.form() {
            Form::Words => self.words * 8,
            Form::Bytes => self.words + self.bytes,
        };
        HEAD + self.groups * 8 + content
    }
}

/// Compares two pages group by group with `compare`, which returns the mask of the words that
/// differ, and the number of bytes that differ. The function is compiled again within each kernel,
/// with the instructions of that kernel.
#[inline(always)]
fn by_groups(
    old: &Page,
    new: &Page,
    limit: usize,
    compare: impl Fn(&Group, &Group) -> (u64, u32),
) -> Option<Difference> {
    let (old, new) = (old.as_chunks().0, new.as_chunks().0);
    let mut found = Difference { masks: [0; GROUPS], groups: 0, words: 0, bytes: 0 };
    for (group, (old, new)) in old.iter().zip(new).enumerate() {
        let (mask, bytes) = compare(old, new);
        if mask != 0 {
            found.masks[group] = mask;
            found.groups += 1;
            found.words += mask.count_ones() as usize;
            found.bytes += bytes as usize;
            if found.len() > limit {
                return None;
            }
        }
    }
    Some(found)
}

/// Compares two groups line by line. This is fast because most lines of a page are unchanged, and
/// every compiler vectorizes the comparison of a line.
fn compare_group(old: &Group, new: &Group) -> (u64, u32) {
    const LINE: usize = 64;
    let (mut mask, mut bytes) = (0, 0);
    for (line, (old, new)) in old.as_chunks::<LINE>().0.iter().zip(new.as_chunks::<LINE>().0).enumerate() {
        if old == new {
            continue;
        }
        for (word, (old, new)) in old.as_chunks().0.iter().zip(new.as_chunks().0).enumerate() {
            let changed = changed_bytes(old, new);
            mask |= u64::from(changed != 0) << (line * LINE / 8 + word);
            bytes += changed.count_ones();
        }
    }
    (mask, bytes)
}

/// Encoder of deltas, with its buffer. It does not allocate after its creation.
#[derive(Debug)]
pub struct DeltaEncoder {
    comparer: Comparer,
    out: Box<Page>,
}

impl Default for DeltaEncoder {
    fn default() -> Self {
        Self::new(Comparer::best())
    }
}

impl DeltaEncoder {
    /// Creates an encoder that compares pages by `comparer`.
    #[must_use]
    pub fn new(comparer: Comparer) -> Self {
        Self { comparer, out: Box::new([0; PAGE_BYTES]) }
    }

    /// Returns the delta that turns `old` into `new`, or `None` if the delta would have more than
    /// `limit` bytes. A limit beyond [`MAX_DELTA`] has the effect of [`MAX_DELTA`].
    ///
    /// The encoder gives up at the first group of 512 bytes with which the delta exceeds the limit.
    #[inline]
    pub fn encode(&mut self, old: &Page, new: &Page, limit: usize) -> Option<&[u8]> {
        let limit = limit.min(MAX_DELTA);
        if limit < HEAD {
            return None;
        }
        let found = self.comparer.compare(old, new, limit)?;
        let (form, len) = (found.form(), found.len());
        self.out[0] = u8::from(form == Form::Bytes);
        let mut at = self.put_masks(&found.masks);
        let (old, new) = (words(old), words(new));
        match form {
            Form::Words => {
                for word in changed_words(&found.masks) {
                    self.out[at..at + 8].copy_from_slice(&new[word]);
                    at += 8;
                }
            }
            Form::Bytes => {
                let masks_at = at;
                at += found.words;
                for (mask_at, word) in (masks_at..).zip(changed_words(&found.masks)) {
                    let changed = changed_bytes(&old[word], &new[word]);
                    self.out[mask_at] = changed;
                    for byte in Bits(changed.into()) {
                        self.out[at] = new[word][byte];
                        at += 1;
                    }
                }
            }
        }
        assert_eq!(at, len, "the length of a delta follows from its masks");
        Some(&self.out[..len])
    }

    /// Writes the groups and their masks, and returns the number of bytes up to their end.
    #[inline]
    fn put_masks(&mut self, masks: &Masks) -> usize {
        let (mut groups, mut at) = (0, HEAD);
        for (group, mask) in masks.iter().enumerate().filter(|(_, mask)| **mask != 0) {
            groups |= 1 << group;
            self.out[at..at + 8].copy_from_slice(&mask.to_le_bytes());
            at += 8;
        }
        self.out[1] = groups;
        at
    }
}

/// Error of a delta that is refused.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum DeltaError {
    /// The bytes end within a delta.
    #[error("a delta of a page needs {needed} bytes, and {len} are left")]
    Truncated {
        /// Number of bytes that the delta needs at least.
        needed: usize,
        /// Number of bytes that are left.
        len: usize,
    },
    /// A delta has an unknown form.
    #[error("a delta of a page has the form {form}, allowed are 0 and 1")]
    Form {
        /// Form of the delta.
        form: u8,
    },
    /// A delta names a group without a changed word.
    #[error("group {group} of a delta has no changed word")]
    EmptyGroup {
        /// Number of the group in the page, from 0 to 7.
        group: usize,
    },
    /// A delta names a word without a changed byte.
    #[error("changed word {word} of a delta has no changed byte")]
    EmptyWord {
        /// Number of the word among the changed words.
        word: usize,
    },
    /// A delta is not shorter than a page.
    #[error("a delta of a page has {len} bytes, allowed are {MAX_DELTA}")]
    TooLong {
        /// Length of the delta in bytes.
        len: usize,
    },
}

/// Delta that was checked completely.
#[derive(Clone, Copy)]
pub struct Delta<'a> {
    masks: Masks,
    content: Content<'a>,
    len: usize,
}

#[derive(Clone, Copy)]
enum Content<'a> {
    /// Invariant: one word for each bit of the masks.
    Words(&'a [[u8; 8]]),
    /// Invariant: one mask for each bit of the masks, and one byte for each bit of these.
    Bytes { changed: &'a [u8], bytes: &'a [u8] },
}

impl fmt::Debug for Delta<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Delta").field("words", &self.words()).field("len", &self.len).finish()
    }
}

impl<'a> Delta<'a> {
    /// Checks the delta at the start of `bytes`, and returns the delta and the bytes after it.
    ///
    /// # Errors
    /// Returns an error if `bytes` does not start with a delta.
    #[inline]
    pub fn parse(bytes: &'a [u8]) -> Result<(Self, &'a [u8]), DeltaError> {
        let part = |from: usize, len: usize| {
            let needed = from + len;
            bytes.get(from..needed).ok_or(DeltaError::Truncated { needed, len: bytes.len() })
        };
        let head = part(0, HEAD)?;
        let (form, groups) = (head[0], head[1]);
        let mut at = HEAD;
        let (mut masks, mut count) = ([0; GROUPS], 0);
        for group in Bits(groups.into()) {
            let mask = part(at, 8)?.try_into().map(u64::from_le_bytes).expect("eight bytes");
            if mask == 0 {
                return Err(DeltaError::EmptyGroup { group });
            }
            masks[group] = mask;
            count += mask.count_ones() as usize;
            at += 8;
        }
        let content = match form {
            0 => {
                let words = part(at, count * 8)?;
                at += words.len();
                Content::Words(words.as_chunks().0)
            }
            1 => {
                let changed = part(at, count)?;
                if let Some(word) = changed.iter().position(|mask| *mask == 0) {
                    return Err(DeltaError::EmptyWord { word });
                }
                at += count;
                let bytes = part(at, changed.iter().map(|mask| mask.count_ones() as usize).sum())?;
                at += bytes.len();
                Content::Bytes { changed, bytes }
            }
            form => return Err(DeltaError::Form { form }),
        };
        if at > MAX_DELTA {
            return Err(DeltaError::TooLong { len: at });
        }
        Ok((Self { masks, content, len: at }, &bytes[at..]))
    }

    /// Writes the changed bytes to `page`, and no others.
    #[inline]
    pub fn apply(&self, page: &mut Page) {
        // The stores complete in order, so without a prefetch each would wait for its line.
        #[cfg(target_arch = "x86_64")]
        x86::prefetch_changed(page, &self.masks);
        let (words, _) = page.as_chunks_mut::<8>();
        let (groups, _) = words.as_chunks_mut::<GROUP_WORDS>();
        match self.content {
            Content::Words(new) => apply_words(groups, &self.masks, new),
            Content::Bytes { changed, bytes } => apply_bytes(groups, &self.masks, (changed, bytes)),
        }
    }

    /// Returns the number of words that the delta changes.
    #[must_use]
    pub fn words(&self) -> u32 {
        self.masks.iter().map(|mask| mask.count_ones()).sum()
    }

    /// Returns the length of the delta in bytes.
    #[must_use]
    #[expect(clippy::len_without_is_empty, reason = "a delta has at least two bytes")]
    pub fn len(&self) -> usize {
        self.len
    }
}

// Nested loops over the groups are faster than one iterator over all changed words. All indices are
// below the lengths of the arrays, so nothing is checked.

/// Writes one word of `new` for each bit of `masks`.
#[inline]
fn apply_words(groups: &mut [GroupWords], masks: &Masks, new: &[[u8; 8]]) {
    let mut new = new.iter();
    for (group, mask) in groups.iter_mut().zip(masks) {
        for (at, new) in Bits(*mask).zip(&mut new) {
            group[at % GROUP_WORDS] = *new;
        }
    }
}

/// Writes one byte of `new` for each bit of `changed`, which has a mask for each bit of `masks`.
#[inline]
fn apply_bytes(groups: &mut [GroupWords], masks: &Masks, (changed, new): (&[u8], &[u8])) {
    let (mut changed, mut new) = (changed.iter(), new.iter());
    for (group, mask) in groups.iter_mut().zip(masks) {
        for (at, changed) in Bits(*mask).zip(&mut changed) {
            // Most words have one changed byte.
            let (word, mut left) = (&mut group[at % GROUP_WORDS], *changed);
            for new in new.by_ref() {
                word[left.trailing_zeros() as usize % 8] = *new;
                left &= left.wrapping_sub(1);
                if left == 0 {
                    break;
                }
            }
        }
    }
}

#[cfg(test)]
mod tests;
