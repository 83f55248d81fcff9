"""Plain English words for keys and word lists.

RULER takes them from the package `wonderwords`, whose lists change with its version. These are the same on every machine,
so that a seed means the same prompts everywhere. They are fewer (official: some thousands): where a prompt needs more
different words than there are, it is made of pairs, as the official one then takes a second, larger list.
"""

import itertools
import random

ADJECTIVES = tuple(
    """
    able absent active actual agile alert alive amber ample ancient angry annual arctic ardent aware awful azure bare basic
    bitter blank bleak blind blond blue blunt bold brave brief bright brisk broad broken bronze brown busy calm careful
    casual central certain charming cheap cheerful chief chilly civil classic clean clear clever close cloudy clumsy cold
    common complex concrete constant cool coral corporate cosmic costly crazy creamy crimson crisp cruel curious curly
    daily damp daring dark dear decent deep delicate dense different digital dim direct dirty distant divine double dramatic
    dry dull dusty eager early eastern easy elastic elder electric elegant empty endless enormous entire equal eternal even
    evident exact exotic external extra faint fair faithful false familiar famous fancy fast fatal federal fierce final fine
    firm flat flexible fluffy foggy fond foolish foreign formal fragile frank free frequent fresh friendly frosty frozen full
    funny fuzzy general generous gentle genuine giant glad global gloomy golden good graceful grand grateful grave gray great
    greedy green grim gross guilty handsome handy happy hard harsh hasty heavy helpful hidden high hollow holy honest hot huge
    humble hungry icy ideal idle immense inner innocent intense internal ivory jolly joyful junior just keen kind large late
    lazy lean legal level light likely lively local lonely long loose loud lovely low loyal lucky lunar mad magnetic main major
    marble massive mature medical mellow mental merry mighty mild minor misty mobile modern modest moist moral muddy mutual
    mystic naive narrow nasty native natural neat nervous neutral nice noble noisy normal northern nutty obvious odd official
    old open optimal orange orderly ordinary outer oval pale parallel partial patient peaceful perfect petite pink plain
    pleasant polite poor popular precise pretty primary prime private proper proud public pure purple quick quiet rapid rare
    raw ready real recent red regal regular remote rich rigid ripe robust rosy rough round royal rude rural rusty sacred sad
    safe salty scarlet secret senior serious severe shallow sharp shiny short shy silent silky silly silver simple sincere
    slender slim slow small smart smooth social soft solar solemn solid sour southern spare special spicy stable stark steady
    steep sticky stiff still strange strict strong stubborn sturdy subtle sudden sunny super sure sweet swift tall tame tart
    tender tense thick thin tidy tight tiny tired tough tragic true typical ugly unique upper urban useful usual vague valid
    vast velvet verbal violet vital vivid warm wary weak wealthy weary western wet white whole wide wild wise witty wonderful
    wooden woolly worthy wrong yellow young zealous
    """.split()
)
"""Adjectives, all different and without hyphens."""

NOUNS = tuple(
    """
    acorn actor airport album alley anchor angle ankle apple apron arch arena arm arrow atlas attic aunt autumn avenue axis
    bacon badge bag bakery balcony ball bamboo banana band bank banner barn barrel basin basket bath battery beach beacon bead
    beam bean bear beard beast bed bee bell belt bench berry bicycle bird biscuit blade blanket blossom board boat bolt bone
    book boot border bottle boulder bowl box bracelet brain branch bread breeze brick bridge broom brother brush bucket bubble
    buffalo bug building bulb bus bush butter button cabbage cabin cable cactus cage cake camel camera camp canal candle canoe
    canvas canyon cap captain car card carpet carrot cart castle cat cathedral cave ceiling cellar chain chair chalk chapel
    cheese cherry chess chest chicken chimney church cinema circle city clay cliff clock cloth cloud clown coach coast coat
    coffee coin collar comet compass cone cook copper corn corner cottage cotton couch country court cousin cow crab cradle
    crane crayon creek crew cricket crow crown crystal cup curtain cushion dancer daughter deer desert desk diamond dinner
    doctor dog doll dolphin donkey door dove dragon drawer dream dress drum duck eagle ear earth elbow elephant engine envelope
    eye fabric factory falcon family farm farmer feather fence fern ferry field finger fire fish flag flame flower flute forest
    fork fountain fox frame friend frog fruit garage garden garlic gate ghost giraffe glacier glass glove goat goose grape grass
    guitar hammer hand harbor harp hat hawk heart hedge helmet hen hill honey hook horizon horn horse hospital hotel house
    hunter igloo insect island ivy jacket jar jelly jewel judge juice jungle kettle key kingdom kitchen kite kitten knee knife
    knight lace ladder lake lamb lamp lantern lawyer leaf leather lemon leopard letter library lily lion lizard lobster lock
    locket lunch machine magnet mango map market mask meadow melon mermaid meteor milk mill mirror mitten monkey moon mother
    motor mountain mouse mouth museum music nail napkin neck needle nephew nest net niece notebook nurse oak oasis ocean office
    olive onion orchard orchid organ otter oven owl oyster paddle page painter palace panda paper parcel park parrot path peach
    peacock pear pearl pebble pelican pen pencil penguin pepper piano picture pig pigeon pillow pilot pine pipe pirate planet
    plate plum pocket poem poet pond pony porch potato prince puddle pumpkin puppet puppy purse puzzle queen quilt rabbit radio
    raft railway rain raven ribbon rice ring river road robin robot rocket roof room root rope rose sailor salad sand sandal
    saddle scarf school scooter sea seal seed shadow shark sheep shell shelf ship shirt shoe shop shoulder sister skirt sky
    snail snake snow soap sock sofa soldier soup spider sponge spoon spring squirrel stable staircase star station statue stone
    storm stove street student sugar suitcase sun swan table tailor teacher temple tent theater thread throat throne thumb
    ticket tiger timber toast tomato tongue tooth tower toy tractor train tree trumpet trunk tulip tunnel turkey turtle uncle
    valley vase vest village vine violin volcano wagon waiter wall walnut water wave whale wheat wheel whistle willow window
    winter wizard wolf wood yard zebra
    """.split()
)
"""Nouns, all different and without hyphens."""

VERBS = tuple(
    """
    accept adopt agree allow announce appear argue arrive assemble assume attend avoid bake become begin behave believe belong
    blink boil borrow bounce breathe bring build bury carry catch celebrate choose chop climb collect combine compare complain
    consider contain continue convince create cross decide defend deliver depend describe destroy discover divide donate drink
    earn educate encourage enjoy enter escape examine exist expand explain explore fasten fetch follow forget forgive gather
    give glow grow guess hang happen hear hesitate hurry imagine improve include increase inform inspire invent invite join
    jump keep kneel know laugh launch learn leave listen lose maintain melt mention mix multiply obey obtain occur offer
    participate pay perform permit persuade pour predict prefer prepare pretend prevent produce promise protect prove provide
    pull push realize receive recognize refuse relax remember remove repair repeat replace require rescue return reveal ride
    ripen run satisfy scatter search select send separate settle share shiver shout sing sleep slide sneeze solve speak spend
    squeeze stand stir succeed suffer suggest support surround survive swallow swim tease tell thank think throw tremble try
    understand unite vanish visit wander warn whisper write yawn yell
    """.split()
)
"""Verbs, all different."""

WORDS = tuple(sorted({*ADJECTIVES, *NOUNS, *VERBS}))
"""All words; a word that is both an adjective and a noun stands once."""


def pair(rng: random.Random) -> str:
    """An adjective and a noun, such as "amber-falcon"."""
    return f"{rng.choice(ADJECTIVES)}-{rng.choice(NOUNS)}"


def all_pairs() -> list[str]:
    """Every pair of an adjective and a noun, in a fixed order."""
    return [f"{adjective}-{noun}" for adjective, noun in itertools.product(ADJECTIVES, NOUNS)]
