//! Parallel test cases, for tests whose cases mostly wait.

use std::sync::Mutex;

/// Runs `work` on each of `items`, on `threads` threads.
///
/// The items are taken in their order.
///
/// # Panics
///
/// Panics if `work` panics. The other threads finish the remaining items first.
pub fn in_parallel<T: Send>(threads: usize, items: impl IntoIterator<Item = T>, work: impl Fn(T) + Sync) {
    let items = Mutex::new(items.into_iter().collect::<Vec<_>>().into_iter());
    std::thread::scope(|scope| {
        for _ in 0..threads {
            scope.spawn(|| {
                loop {
                    let Some(item) = ({ items.lock().unwrap().next() }) else { break };
                    work(item);
                }
            });
        }
    });
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_item_is_processed_once() {
        let done = Mutex::new(Vec::new());
        in_parallel(3, 0..50, |item| done.lock().unwrap().push(item));
        let mut done = done.into_inner().unwrap();
        done.sort_unstable();
        assert_eq!(done, (0..50).collect::<Vec<_>>());
    }
}
