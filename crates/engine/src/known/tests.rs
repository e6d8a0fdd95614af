use super::*;
use proptest::prelude::*;
use std::os::unix::fs::FileExt;
use vmferry_core::PAGE_SIZE;

/// Returns a file in memory.
fn file(len: u64) -> File {
    let file = File::from(rustix::fs::memfd_create("known", rustix::fs::MemfdFlags::CLOEXEC).unwrap());
    file.set_len(len).unwrap();
    file
}

fn page(fill: u8) -> Page {
    let mut page = [fill; PAGE_BYTES];
    page[17] = !fill;
    page
}

fn put(file: &File, at: u64, fill: u8) {
    file.write_all_at(&page(fill), at * PAGE_SIZE).unwrap();
}

fn index(files: &[&File]) -> KnownPages {
    let named = |file: &&File| ("file".to_owned(), file.try_clone().unwrap());
    KnownPages::index(files.iter().map(named).collect()).unwrap()
}

fn finds(known: &KnownPages, fill: u8) -> bool {
    find_all(known, &[fill]) == [true]
}

/// Looks up pages together. Returns for each whether it is known.
fn find_all(known: &KnownPages, fills: &[u8]) -> Vec<bool> {
    let pages: Vec<Page> = fills.iter().map(|fill| page(*fill)).collect();
    let wanted: Vec<_> = pages.iter().map(|page| (PageDigest::of(page), PageHash::of(page))).collect();
    let mut found = vec![[0; PAGE_BYTES]; pages.len()];
    let is_known = known.find(&wanted, &mut found);
    for ((is_known, found), page) in is_known.iter().zip(&found).zip(&pages) {
        assert!(!is_known || found == page, "a page with this hash has another content");
    }
    is_known
}

#[test]
fn pages_of_several_sparse_images_are_found() {
    let (a, b) = (file(3000 * PAGE_SIZE), file(700 * PAGE_SIZE + 5));
    [(0, 1), (1, 2), (255, 3), (256, 4), (2999, 5)].iter().for_each(|(at, fill)| put(&a, *at, *fill));
    [(0, 5), (699, 6)].iter().for_each(|(at, fill)| put(&b, *at, *fill));
    let known = index(&[&a, &b]);
    assert_eq!((known.pages(), known.is_truncated()), (6, false), "equal pages count once");
    assert_eq!(known.memory_bytes(), 6 * 16);
    assert!((1..=6).all(|fill| finds(&known, fill)));
    assert!(!finds(&known, 7) && !finds(&known, 0));
    assert_eq!(index(&[]).pages(), 0);
    assert_eq!(index(&[&file(0), &file(100)]).pages(), 0, "files without a page");
}

#[test]
fn page_that_changed_after_the_index_is_not_found() {
    let own = file(20 * PAGE_SIZE);
    (0..20).zip(1u8..).for_each(|(at, fill)| put(&own, at, fill));
    let known = index(&[&own]);
    put(&own, 4, 77);
    assert!(finds(&known, 4) && !finds(&known, 5) && !finds(&known, 77));
    own.set_len(10 * PAGE_SIZE + 100).unwrap();
    assert!(finds(&known, 10) && !finds(&known, 11) && !finds(&known, 20));
    assert_eq!(known.stale.into_inner(), 3);
}

#[test]
fn digest_alone_does_not_make_a_page_known() {
    let own = file(PAGE_SIZE);
    put(&own, 0, 1);
    let known = index(&[&own]);
    let there = page(1);
    let finds =
        |digest: &Page, hash| known.find(&[(PageDigest::of(digest), hash)], &mut [[0; PAGE_BYTES]]) == [true];
    assert!(finds(&there, PageHash::of(&there)));
    assert!(!finds(&there, PageHash::of(&page(2))));
    let mut hash = PageHash::of(&there);
    hash.0[31] ^= 1;
    assert!(!finds(&there, hash), "31 of 32 bytes are equal");
    assert!(!finds(&page(2), PageHash::of(&there)));
}

#[test]
fn pages_next_to_each_other_are_read_together_and_judged_one_by_one() {
    let own = file(30 * PAGE_SIZE);
    (0..30).zip(1u8..).for_each(|(at, fill)| put(&own, at, fill));
    let known = index(&[&own]);
    let order: Vec<u8> = (1..=20).chain([25, 24, 99, 100]).chain(26..=30).collect();
    let expected =
        |unknown: &[u8]| -> Vec<bool> { order.iter().map(|fill| !unknown.contains(fill)).collect() };
    assert_eq!(find_all(&known, &order), expected(&[99, 100]));
    put(&own, 4, 77);
    own.set_len(27 * PAGE_SIZE + 9).unwrap();
    assert_eq!(find_all(&known, &order), expected(&[5, 28, 29, 30, 99, 100]));
}

#[test]
fn index_holds_no_more_pages_than_its_limit() {
    let own = file(64 * PAGE_SIZE);
    (0..64).zip(1u8..).for_each(|(at, fill)| put(&own, at, fill));
    let files = |count| (0..count).map(|_| ("file".to_owned(), own.try_clone().unwrap())).collect();
    let known = KnownPages::index_at_most(files(2), 40).unwrap();
    assert!(known.is_truncated() && known.pages() <= 40);
    let error = KnownPages::index(files(KnownPages::MAX_FILES + 1)).unwrap_err().to_string();
    assert!(error.contains("1025 files"), "{error}");
}

#[test]
fn file_that_is_no_regular_file_is_refused() {
    let error =
        KnownPages::index(vec![("it".into(), File::open("/dev/zero").unwrap())]).unwrap_err().to_string();
    assert_eq!(error, "cannot use it: it is not a regular file");
}

proptest! {
    #[test]
    fn search_near_a_guess_finds_what_a_search_in_all_finds(
        mut sorted in proptest::collection::vec(0u64..5000, 0..3000),
        guess in 0usize..4000,
        wanted in 0u64..5000,
    ) {
        sorted.sort_unstable();
        sorted.dedup();
        let near = around(guess, sorted.len(), |at| sorted[at].cmp(&wanted));
        let found = sorted[near.clone()].binary_search(&wanted).ok().map(|at| near.start + at);
        prop_assert_eq!(found, sorted.binary_search(&wanted).ok());
    }
}
