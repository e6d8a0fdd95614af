//! Check that every run is finite, so that "in the end" has a meaning: no state can be reached
//! again.

use super::world::World;
use super::{Bounds, FEW_STATES, MODES, MigrationMode, Protocol};
use stateright::Model;
use std::collections::HashMap;
use std::hash::{DefaultHasher, Hash, Hasher};

fn key(world: &World) -> u64 {
    let mut hasher = DefaultHasher::new();
    world.hash(&mut hasher);
    hasher.finish()
}

fn successors(model: &Protocol, world: &World) -> Vec<World> {
    let mut happenings = Vec::new();
    model.actions(world, &mut happenings);
    happenings.into_iter().filter_map(|happening| model.next_state(world, happening)).collect()
}

/// Searches in depth. A state that is met again while it is on the present path closes a cycle.
/// Returns the number of states.
///
/// Under an emulator the search ends after [`FEW_STATES`].
fn walk(model: &Protocol) -> Result<usize, String> {
    let start = model.init_states().remove(0);
    let mut done: HashMap<u64, bool> = HashMap::new();
    done.insert(key(&start), false);
    let mut way = vec![(key(&start), successors(model, &start))];
    let most = if vmferry_testkit::emulator().is_some() { FEW_STATES } else { usize::MAX };
    while done.len() < most
        && let Some((at, left)) = way.last_mut()
    {
        let Some(next) = left.pop() else {
            done.insert(*at, true);
            way.pop();
            continue;
        };
        let key = key(&next);
        match done.get(&key) {
            Some(true) => {}
            Some(false) => return Err(format!("a run comes back to {next:?}")),
            None => {
                done.insert(key, false);
                way.push((key, successors(model, &next)));
            }
        }
    }
    Ok(done.len())
}

#[test]
fn every_run_comes_to_an_end() {
    let bounds = Bounds { writes: 1, ..Bounds::SHORT };
    let plain = MODES.map(|mode| Protocol::new(mode, bounds));
    let with_arbiter = [MigrationMode::Precopy, MigrationMode::Postcopy];
    let with_arbiter = with_arbiter.map(|mode| Protocol::new(mode, bounds).with_arbiter());
    for model in plain.into_iter().chain(with_arbiter) {
        let (mode, with_arbiter) = (model.mode, model.with_arbiter);
        match walk(&model) {
            Ok(states) => {
                println!(
                    "model: {mode} (fence: {with_arbiter}): {states} states, none of which is come back to"
                );
            }
            Err(circle) => panic!("{mode} (fence: {with_arbiter}): {circle}"),
        }
    }
}
